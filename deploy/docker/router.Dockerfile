# The router alone: HTTP, scheduling and text, without torch.
#   docker build -f deploy/docker/router.Dockerfile -t millrace-router .
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
COPY proto proto
COPY router router
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./proto ./router \
    && python -m venv /opt/millrace \
    && /opt/millrace/bin/pip install --no-cache-dir -c constraints.txt \
    /wheels/millrace_proto-*.whl "$(echo /wheels/millrace_router-*.whl)[otel,kv-events,images]"

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Millrace router" \
      org.opencontainers.image.description="REST front and scheduler of the Millrace text-generation server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN useradd --uid 10001 --create-home millrace
COPY --from=build /opt/millrace /opt/millrace
COPY --chmod=644 deploy/docker/http_health.py /opt/millrace/http_health.py
ENV PATH=/opt/millrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PORT=3000
USER 10001
WORKDIR /home/millrace
EXPOSE 3000
HEALTHCHECK --interval=10s --timeout=6s --start-period=300s --retries=3 \
    CMD ["python", "/opt/millrace/http_health.py"]
ENTRYPOINT ["millrace-router"]
