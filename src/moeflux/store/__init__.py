"""The expert store: routed experts live on the drive, a fixed number of slots in memory holds those in use.

`ExpertStore` is the room's face; native/store does the work. Nothing here changes a result: it decides when bytes come.
"""
