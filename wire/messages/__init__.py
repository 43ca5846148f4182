"""Every message between processes, one module per direction; nothing else travels.

Control (DEALER at the worker, ROUTER at the controller):
    to_generator    controller -> generator
    from_generator  generator  -> controller
    to_trainer      controller -> trainer
    from_trainer    trainer    -> controller
Data (DEALER at the generator, ROUTER at the trainer):
    data            trajectories to the trainer, acknowledgements back
User:
    control         CLI -> controller and back

The control plane carries decisions and a few numbers per sample; tokens go straight from the
generator that wrote them to the trainer, so the controller's load does not grow with length.
Messages are msgspec structs, tagged by class name, in MessagePack; arrays are raw little-endian
bytes. Unknown tags, wrong types and wrong lengths raise `msgspec.ValidationError` at the receiver.
"""
