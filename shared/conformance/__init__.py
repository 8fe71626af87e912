"""The conformance kit: drives one service through its sockets and plays all of its neighbours.

A scenario is a short life of a service's links; a rule is one sentence that may be looked at in many
scenarios and in every message. What is reported are rules.
"""
