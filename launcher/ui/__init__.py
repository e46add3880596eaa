"""The live view of a run in full screen: `p2pfl launch --ui`, and `p2pfl ui RUN` for any other run.

    state.py    what it shows, from the files of the run folder
    drawing.py  lines of text: a row per peer, sparklines, the heat map
    app.py      the screens and keys (textual)
    __main__.py its process
    progress.py in the launcher: starts that process, and passes on what it prints

It is a separate process with low priority that only reads files: it slows neither peers nor launcher. Its end, by a
key or by an error, changes nothing for the run.
"""

from __future__ import annotations
