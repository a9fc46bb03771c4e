# One shard of a Millrace model on CPU; it needs no containers except the other shards of its group.
#   docker build -f deploy/docker/shard-cpu.Dockerfile -t millrace-shard-cpu --build-arg TORCH_INDEX=... .
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# The compiler makes the CPU kernels that the wheel has, for all kinds of x86 processors with AVX2.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes g++
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY shard shard
# PyTorch publishes its CPU builds in a separate index; without it, pip installs the CUDA build. The kernels are compiled
# for the torch that is there.
ARG TORCH_INDEX=""
RUN python -m venv /opt/millrace \
    && /opt/millrace/bin/pip install --no-cache-dir -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} torch \
    && /opt/millrace/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./proto ./shard \
    && /opt/millrace/bin/pip install --no-cache-dir -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
    /wheels/millrace_proto-*.whl "$(echo /wheels/millrace_shard-*.whl)[otel]"

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Millrace shard (CPU)" \
      org.opencontainers.image.description="One shard of a Millrace model on CPU; needs no other container but its group." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# A volume at /data keeps packed weights for the next container.
RUN useradd --uid 10001 --create-home millrace \
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
