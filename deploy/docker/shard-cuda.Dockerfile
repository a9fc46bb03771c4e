# One shard of a Millrace model on an NVIDIA GPU. torch includes the CUDA libraries; the host has the driver.
#   docker build -f deploy/docker/shard-cuda.Dockerfile -t millrace-shard-cuda .
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY shard shard
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./proto ./shard \
    && python -m venv /opt/millrace \
    && /opt/millrace/bin/pip install --no-cache-dir -c constraints.txt \
    /wheels/millrace_proto-*.whl "$(echo /wheels/millrace_shard-*.whl)[cuda,otel]"

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Millrace shard (CUDA)" \
      org.opencontainers.image.description="One shard of a Millrace model on an NVIDIA GPU; torch brings the CUDA libraries, the host the driver." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# Triton compiles its launchers with the host compiler, and its kernels for the GPU at the first start. A volume at /data
# keeps them for the next container.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home millrace \
    && install --directory --owner=10001 /data
COPY --from=build /opt/millrace /opt/millrace
COPY --chmod=644 deploy/docker/shard_health.py /opt/millrace/shard_health.py
ENV PATH=/opt/millrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MILLRACE_CACHE=/data/millrace \
    ADDRESS=0.0.0.0:50051
USER 10001
WORKDIR /home/millrace
EXPOSE 50051 29500
HEALTHCHECK --interval=10s --timeout=6s --start-period=600s --retries=3 \
    CMD ["python", "/opt/millrace/shard_health.py"]
ENTRYPOINT ["millrace-shard"]
