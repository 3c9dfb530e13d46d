"""How telemetry travels: encoding, queues, transports, files, replay."""
