"""Load levels against our own server and its peers, on one machine, from one command line."""
