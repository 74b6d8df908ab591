"""`make experiment`: what each way of admitting calls makes of the same engine under the same calls, in virtual time.

`traces` says which calls come, `engines` serves them as `kvgate mock` would, `gates` lets them in, `world` plays one
run, `cells` are all runs, `report` writes `docs/utilisation.md`.
"""
