"""The command `moorage`: one file per verb (or small group of verbs), printers apart.

Nothing here imports grpc, protobuf or the server at module level, so that `moorage --help` and completion stay quick.
"""
