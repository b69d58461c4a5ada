# The image of the API, from the base package alone. Flower uses the same file with --build-arg EXTRAS=[flower].
FROM python:3.11.15-slim-bookworm AS build
ARG EXTRAS=""
RUN python -m venv /opt/tinsmith
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY workers workers
RUN /opt/tinsmith/bin/pip install --no-cache-dir -c constraints.txt ".${EXTRAS}"

FROM python:3.11.15-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/lib/tinsmith --create-home tinsmith
COPY --from=build /opt/tinsmith /opt/tinsmith
ENV PATH=/opt/tinsmith/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TMPDIR=/var/lib/tinsmith
USER 10001
WORKDIR /var/lib/tinsmith
EXPOSE 8000
CMD ["python", "-m", "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application"]
