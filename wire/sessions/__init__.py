"""Sessions: two ends between which nothing is lost or doubled, whatever happens to relays.

    child ── ipc ── relay ── TCP ── controller
      └──────────── session ───────────┘

A relay and its connections may be lost at any time, with whatever they hold. So the two ends number
their frames, acknowledge what they have, and send again what the other end lacks.

session   one end: what to send, deliver, acknowledge and send again. No sockets, no clock
peers     the controller's ends: who is reached through which relay. No sockets, no clock
urgency   which messages do not wait
line      a child's end, on a socket
"""
