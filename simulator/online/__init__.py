"""Models of availability, a file each: when clients are online."""
