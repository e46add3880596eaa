# One peer of a mesh. `docker build -t p2pfl .`; docs/deploy.md says the rest.
#
# BASE         any image with python3 (3.11 or newer) and its venv module
# TORCH_INDEX  where torch comes from; by default builds for the CPU, a fifth of the size of those with CUDA.
#              Empty: what the package index has, which is CUDA: `--build-arg TORCH_INDEX=`
# UID          of the user that peers run as
#
# Layers go from what changes least to what changes most: a change of the project's own code makes a layer of two
# megabytes, and torch is fetched again only when the list of dependencies changes.
ARG BASE=python:3.12-slim-bookworm

# ---- what pyproject.toml asks for, and nothing else of it: the next stage depends on these two lists only
FROM ${BASE} AS requirements
COPY pyproject.toml /
RUN python3 -c 'import tomllib; wanted = tomllib.load(open("/pyproject.toml", "rb"))["project"]["dependencies"]; \
    torch = [one for one in wanted if one.startswith("torch")]; \
    open("/torch.txt", "w").write("\n".join(torch)); \
    open("/others.txt", "w").write("\n".join(wanted))'

# ---- a virtual environment without pip, which stays behind in /opt/pip
FROM ${BASE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv --without-pip /opt/p2pfl && python3 -m venv /opt/pip
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements /torch.txt /tmp/
RUN /opt/pip/bin/pip --python /opt/p2pfl/bin/python install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r /tmp/torch.txt
COPY --from=requirements /others.txt /tmp/
RUN /opt/pip/bin/pip --python /opt/p2pfl/bin/python install -r /tmp/others.txt

# ---- the project itself, as the files that it adds to that environment
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY p2pfl /src/p2pfl
COPY peers /src/peers
COPY launcher /src/launcher
RUN /opt/pip/bin/pip --python /opt/p2pfl/bin/python install --no-deps --root /layer /src

FROM ${BASE}
ARG UID=1000
# The places that volumes are mounted on belong to that user, and so do new volumes.
RUN useradd --uid "$UID" --create-home --shell /usr/sbin/nologin p2pfl \
    && install -d -o p2pfl -g p2pfl -m 0755 /run/p2pfl /data /data/files /data/decoded \
    && install -d -m 0755 /keys
COPY --from=dependencies /opt/p2pfl /opt/p2pfl
COPY --from=project /layer/ /
ENV PATH=/opt/p2pfl/bin:$PATH PYTHONUNBUFFERED=1
USER p2pfl
# A peer loads torch before it can answer.
HEALTHCHECK --interval=15s --timeout=10s --start-period=2m --retries=3 CMD ["python", "-P", "-m", "peers", "--health"]
ENTRYPOINT ["p2pfl", "peer"]
