"""What adapters cost."""
