"""Sessions: two ends between which nothing is lost or doubled, even if relays are lost.

    child ── ipc ── relay ── TCP ── controller
      └──────────── session ───────────┘

The two ends number their frames, acknowledge received ones, and resend what the other end lacks.

    session   one end: send, deliver, acknowledge, resend. No sockets, no clock
    peers     the controller's ends: the relay of each peer. No sockets, no clock
    line      a child's end, on a socket, and the urgency of its messages
"""
