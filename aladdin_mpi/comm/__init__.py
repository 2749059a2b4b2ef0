"""The only room that knows MPI: mailbox, control messages, roles, and the worker's sender
thread.
"""
