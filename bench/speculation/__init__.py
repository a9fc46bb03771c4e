"""What guessing tokens ahead is worth, on text that repeats itself and on text that does not."""
