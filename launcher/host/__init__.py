"""Facts of this node, read once. `facts.read_host_facts` is the door; every other module here reads one kind of fact.

Nothing in this package creates a CUDA context, writes a file or decides anything.
"""
