"""Sessions: two ends between which nothing is lost or doubled, even if relays are lost.

    child ── ipc ── relay ── TCP ── controller
      └──────────── session ───────────┘

The two ends number their frames, acknowledge received ones, and resend what the other end lacks.
"""
