"""The lifecycle and its values. Pure: values in, values out; no clock, disk, socket or thread."""
