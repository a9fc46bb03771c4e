"""`millrace-verify`: proves on the user's own model that a request's output does not depend on its company."""
