"""Every message between processes, one module per direction.

Control plane (the workers connect to the controller):

    to_generator    controller -> generator
    from_generator  generator  -> controller
    to_trainer      controller -> trainer
    from_trainer    trainer    -> controller
    to_relay        controller -> relay of a node
    from_relay      relay      -> controller

Others:

    to_agent        controller -> agent of a machine, before any process of the run
    from_agent      agent      -> controller
    data            trajectories from generators to the trainer, acknowledgements back
    chain           nodes that request the weights of a version from each other
    files           relays that request the files of a node from each other
    control         CLI -> controller and back

The control plane carries decisions and a few numbers per sample; tokens go straight from the
generator to the trainer. Messages are msgspec structs tagged with their class name, in MessagePack.
Unknown tags and wrong types raise `msgspec.ValidationError` at the receiver. Arrays are raw bytes
(`wire.messages.data`).
"""
