"""The messages between processes, by the process that answers. Import them from `barrel_inference.protocol`."""
