# The image of a peer: `docker build -t p2pfl .`; see docs/deploy.md.
#
# BASE         any image with python3 (3.11 or newer) and its venv module
# TORCH_INDEX  package index for torch; by default that of the CPU builds, a fifth of the size of CUDA builds.
#              Empty for PyPI's builds, which include CUDA: `--build-arg TORCH_INDEX=`
# UID          user id that peers run as
#
# Layers are ordered by how rarely they change: a change to the project's code adds a layer of 6 MB, and torch is
# downloaded again only if the dependencies change.
ARG BASE=python:3.12-slim-bookworm

# ---- the dependencies in pyproject.toml: the next stage depends only on these two lists
FROM ${BASE} AS requirements
COPY pyproject.toml /
RUN python3 -c 'import tomllib; wanted = tomllib.load(open("/pyproject.toml", "rb"))["project"]["dependencies"]; \
    torch = [name for name in wanted if name.startswith("torch")]; \
    open("/torch.txt", "w").write("\n".join(torch)); \
    open("/others.txt", "w").write("\n".join(wanted))'

# ---- a virtual environment without pip, which is in /opt/pip and not copied
FROM ${BASE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv --without-pip /opt/p2pfl && python3 -m venv /opt/pip
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /torch.txt /tmp/
RUN /opt/pip/bin/pip --python /opt/p2pfl/bin/python install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r /tmp/torch.txt
COPY --from=requirements /others.txt /tmp/
RUN /opt/pip/bin/pip --python /opt/p2pfl/bin/python install -r /tmp/others.txt

# ---- the files that the project adds to that environment
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY p2pfl /src/p2pfl
COPY peers /src/peers
COPY launcher /src/launcher
RUN /opt/pip/bin/pip --python /opt/p2pfl/bin/python install --no-deps --root /layer /src

FROM ${BASE}
ARG UID=1000
# New volumes inherit the owner of the folder where they are mounted.
RUN useradd --uid "$UID" --create-home --shell /usr/sbin/nologin p2pfl \
    && install -d -o p2pfl -g p2pfl -m 0755 /run/p2pfl /data /data/files /data/decoded \
    && install -d -m 0755 /keys
COPY --from=dependencies /opt/p2pfl /opt/p2pfl
COPY --from=project /layer/ /
ENV PATH=/opt/p2pfl/bin:$PATH PYTHONUNBUFFERED=1
USER p2pfl
# The start period covers the import of torch.
HEALTHCHECK --interval=15s --timeout=10s --start-period=2m --retries=3 CMD ["python", "-P", "-m", "peers", "--health"]
ENTRYPOINT ["p2pfl", "peer"]
