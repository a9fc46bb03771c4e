"""Tool calls as models write them: grammars that make them right, parsers that find them in text as it comes."""
