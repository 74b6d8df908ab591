"""Constants of the queue's order, shared by the specification and the Lua (a test compares them)."""

LAYOUT = 7
"""Number of the layout of the keys; two layouts side by side would hand the budget out twice."""
LOOKAHEAD = 8
"""Flows of one class that a dispatch looks at before it leaves the class."""
WORK = 32
"""Grants, parkings, holds, unparkings and expiries of one script; what is left is done by the next."""
SLICE = 16
"""Calls of lost owners, and expired tickets, given back by one script; flows that it looks at again for their keys'
parts of pools whose limits have changed."""
OUTBOX = 64
"""Grants told in one reply."""
TAG_SCALE = 64
"""Resolution of a start tag: tag units per block-second at weight 1."""
CREDIT_SCALE = 1000
"""Shares are in thousandths, so a class's credit is blocks x 1000."""
POOL_SHARE_SCALE = 1_000_000
"""The part of a pool that a key may hold is in millionths."""
DRAIN_WINDOW_MS = 10_000
"""Window of the average of blocks given back."""
DRAIN_SETTLING_MS = 1_000
"""A window younger than this is not extrapolated: one early settle would promise too much."""
FIRST_APPOINTMENT_MS = 1_000
"""The wait that is told before anything was ever given back."""
FORECAST_ENDS = 32
"""Ends of running calls that an owner foresees in the store, the next ones; each makes room for about one call."""
FORECAST_REACH_MS = 3_600_000
"""Ends that are further away are not told."""
FORECAST_WAITING = 32
"""Where fewer wait, the order is played forward over these ends; over many calls the drain is an average."""
FORECAST_MARGIN_PERCENT = 15
"""What those who come later and go before add to a wait, in the mean of the simulation's loads."""
FORECAST_PLAYED = 64
"""Ends that are played at most, once a script."""
APPOINTMENT_MAX_MS = 60_000
"""No answer sends a client away for longer, so the book of appointments does not reach further."""
KEPT_PART = 10
"""While anybody was asked to come back, the tenth part of the places and the time of a queue is kept for them."""
PLACE_ONLY, ASKED_BACK = 1, 2
"""Standings of a call that asks for a place: it may wait only in the place that it left; it comes back when asked
to.  0: as others."""
DIGEST_MODULUS = 2**48
"""The digest's sum of ids stays an exact double in Lua: 48 bits plus one id of 40."""
PLACE_MS = 10_000
"""How long the place of a call that left the queue is remembered."""
PLACES = 10_000
"""Remembered at once; the one that would end first makes room."""
PLACES_OF_FLOW = 1_000
"""Of these may be one flow's; beyond that who leaves it is not remembered, and pushes nobody out."""
HOLD_MS = 10_000
"""How long the blocks of an answer are held softly for the next turn of its conversation."""
HOLDS_MAX = 4_096
"""Such holds of one replica; beyond it the oldest goes."""
HOLDS_ENDED = 64
"""Of those whose time is over one script ends so many."""
HOLD_PART = 2
"""One in so many blocks of a replica counts as held softly at most."""
HISTORIES = 10
"""There are holds only where the limit is so many times the average of what was used by the calls that ended there."""
HISTORY_WEIGHT = 64
"""An answer is one part in so many of that average."""
YIELD_MS = 30_000
"""So long after it came a call lets warm ones go before it."""
QUOTA_BUCKETS = 6
"""Rate quotas that a key may have."""
SHUT_RETRY_MS = 5000
"""Until a call that met a fleet shut by the operator should come back: nobody knows when he opens it."""
OPERATOR = "operator"
"""Who says that a replica rests, where that is no owner."""
ID_BITS = 40
BATCH_OPS = 64
"""Ops of one batch."""
LANES = 8
CLASSES = 8
