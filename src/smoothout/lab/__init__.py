"""Train, compare and reproduce by command. Needs the extra `lab`."""
