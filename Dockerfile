# CPU:  docker build -t fastamp .
# CUDA: docker build -t fastamp --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 --build-arg INDEX=https://download.pytorch.org/whl/cu128 .
# Run:  docker run --rm -it [--gpus all] --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD:/workspace" fastamp demo
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}
# Versions of PyTorch from this index take precedence over those of PyPI.
ARG INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=vis,parquet,export

# Images without Python, such as those of CUDA, get that of the distribution.
# hadolint ignore=DL3008
RUN command -v python3 > /dev/null || { \
        apt-get update \
        && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    }
ENV PATH=/opt/venv/bin:$PATH
COPY . /opt/fastamp
RUN python3 -m venv --system-site-packages /opt/venv \
    && pip install --no-cache-dir --extra-index-url "$INDEX" "/opt/fastamp[$EXTRAS]" \
    && rm -rf /opt/fastamp

# Any user may write here.
RUN mkdir --mode 1777 /workspace
ENV HOME=/workspace
USER 10001
WORKDIR /workspace
ENTRYPOINT ["fastamp"]
CMD ["help"]
