FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --constraint constraints.txt build hatchling \
 && python -m venv /opt/kvgate
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY lua ./lua
COPY gateway ./gateway
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /dist \
 && /opt/kvgate/bin/pip install --no-cache-dir --constraint constraints.txt "$(echo /dist/kvgate-*.whl)[embedded,exact,jwt]"

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="kvgate" \
      org.opencontainers.image.description="Token-budgeted admission control in front of vLLM fleets" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin kvgate
COPY --from=build /opt/kvgate /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8080
# Docker waits this signal out for as long as the stop time-out says: set it above server.grace_seconds.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=3 \
  CMD ["python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8080, timeout=2); c.request('GET', '/health/live'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["kvgate"]
CMD ["serve", "--config", "/etc/kvgate/kvgate.yaml", "--host", "0.0.0.0"]
