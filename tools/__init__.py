"""Programs for those who change Millrace."""
