"""What runs on a rank: the server's loop, the worker's step, the session that users talk to."""
