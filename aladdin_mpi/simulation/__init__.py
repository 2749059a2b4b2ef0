"""An event-driven model of workers, servers and the links between them, without MPI.

``setting`` says what is modelled, ``events`` and ``links`` are its clock and its network,
``served`` the asynchronous algorithms with servers, ``rounds`` those that go on in rounds, and
``answers`` what a user asks.  ``training`` runs the algorithms' own files in the same virtual time.
"""
