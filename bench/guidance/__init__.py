"""What grammars cost, and whether what is generated under them is always what they say."""
