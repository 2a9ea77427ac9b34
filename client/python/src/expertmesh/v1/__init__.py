"""Generated from proto/expertmesh/v1: `moe_pb2`, `moe_pb2_grpc` and their siblings."""
