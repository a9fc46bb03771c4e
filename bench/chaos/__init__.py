"""A seeded campaign of faults against the real server under load, and the audit that follows."""
