"""gRPC for all services: server process, guards of each RPC, client calls, mapping of errors."""
