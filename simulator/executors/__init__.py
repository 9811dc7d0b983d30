"""Where blocks of clients run: in this process, or on a pool of Ray actors."""
