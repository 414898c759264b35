"""The helper processes: router, index, writer, pressure; and `model`, one process per loaded model."""
