"""The version of every distribution of this repository; the wheels read it from here."""

VERSION = "0.1.0"
