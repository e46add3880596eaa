"""``p2pfl report``: what one run did, or how several compare, as one self-contained HTML page and as figures.

    numbers     names and numbers as a page shows them
    history     the records of a run as columns: accuracy, losses, bytes, seconds, mixing weights, traffic
    events      faults, restarts, warnings
    learned     data partition, confusion matrices, projected embeddings and prototypes; needs the models
    findings    which peers stand out, and by what
    collect     all of these for one run
    several     curves of groups of runs, and paired tests
    charts      Vega-Lite specifications
    sections    the sections of the page, as HTML
    page        the page: template, style, script and the bundled plotting library
    papers      the charts as PNG and PDF
    drawings    pictures of graphs and data partitions, without a run
    command     what `p2pfl report`, and `report: true`, do

Whatever comes from a run folder is data: text is escaped as HTML, JSON is kept out of the script, and the page's
content security policy lets no other script run and nothing be requested.
"""
