"""Generated from proto/ by tools/generate_pb.py."""
