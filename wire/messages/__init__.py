"""Every message between processes, one module per direction.

The control plane carries decisions and a few numbers per sample; tokens go straight from the
generator to the trainer. Messages are msgspec structs tagged with their class name, in MessagePack.
Unknown tags and wrong types raise `msgspec.ValidationError` at the receiver. Arrays are raw bytes
(`wire.messages.data`).
"""
