"""Where sandboxes come from. One module a backend; none imports another."""
