"""gRPC plumbing, once for all services: server process, client calls, error mapping, health, metrics."""
