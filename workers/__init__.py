"""The processes under the supervisor.

Reading order: router (with registry, loading, observing), index (with index_rows, index_room, index_errands), writer, pressure;
`model` has one process per loaded model.
"""
