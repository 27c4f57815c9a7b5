"""Greet, and leave a file behind."""

from pathlib import Path

print("Hello")
Path("greeting.txt").write_text("Hello\n", "utf-8")
