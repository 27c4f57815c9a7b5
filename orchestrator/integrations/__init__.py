"""Adapters to other programs: thin, typed, and loaded only by those who use them."""
