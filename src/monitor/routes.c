/* Where a living run is reached: the server's paths, and agent.json that says where it listens. */
#include "base/fail.h"
#include "base/json_writer.h"
#include "monitor/json.h"
#include "monitor/metrics.h"
#include "monitor/page.h"
#include "monitor/parts.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

static int answer(void *context, const even_server_request *request, even_text *body, const char **content_type) {
  static const char json[] = "application/json; charset=utf-8";
  even_monitor *monitor = context;
  const char *path = even_server_path(request);
  uint64_t now = even_clock_ns();
  even_measure measure;
  int code = 200;
  (void)pthread_mutex_lock(&monitor->lock);
  *content_type = json;
  if (strcmp(path, "/") == 0) {
    *content_type = "text/html; charset=utf-8";
    even_page_live(body);
  } else if (strcmp(path, "/api/v1/summary") == 0) {
    even_state_measure(monitor->state, now, &measure);
    even_monitor_json_summary(monitor->state, &measure, body);
  } else if (strcmp(path, "/api/v1/steps") == 0) {
    long limit = even_server_query(request, "limit", 0);
    even_monitor_json_steps(monitor->state, even_server_query(request, "since", -1), limit < 0 ? 0 : (size_t)limit,
                            body);
  } else if (strcmp(path, "/api/v1/spans") == 0) {
    even_state_measure(monitor->state, now, &measure);
    even_monitor_json_spans(monitor->state, &measure, body);
  } else if (strcmp(path, "/api/v1/events") == 0) {
    long since = even_server_query(request, "since", 0);
    even_monitor_json_events(monitor->state, since < 0 ? 0 : (uint64_t)since, body);
  } else if (strcmp(path, "/metrics") == 0) {
    *content_type = EVEN_METRICS_CONTENT_TYPE;
    even_monitor_metrics(monitor->state, now, body);
  } else {
    code = 404;
    *content_type = "text/plain; charset=utf-8";
    even_text_add(body, "there is /, /api/v1/summary, /api/v1/steps, /api/v1/spans, /api/v1/events and /metrics\n");
  }
  (void)pthread_mutex_unlock(&monitor->lock);
  return code;
}

static const char address[] = "127.0.0.1";

even_status even_monitor_check_port(int port) {
  return even_server_check(address, port);
}

even_status even_monitor_serve(even_monitor *monitor, const even_monitor_params *params) {
  if (params->port < 0) {
    return EVEN_OK;
  }
  even_server_params server = {
      .address = address, .port = params->port, .token = monitor->token, .answer = answer, .context = monitor};
  even_status status = even_server_open(&server, &monitor->server);
  if (status == EVEN_ERR_IN_USE && params->continues) {
    even_error_clear();
    server.port = 0;
    status = even_server_open(&server, &monitor->server);
  }
  EVEN_TRY(status);
  (void)snprintf(monitor->url, sizeof monitor->url, "http://%s:%d/?token=%s", address,
                 even_server_port(monitor->server), monitor->token);
  return EVEN_OK;
}

static even_status agent_file(const even_monitor *monitor, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "%s/agent.json", monitor->folder);
  return even_text_status(out);
}

even_status even_monitor_agent_file_write(even_monitor *monitor) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&content, 2);
  even_json_object(&json, NULL);
  even_json_integer(&json, "pid", even_own_process());
  even_json_string(&json, "url", monitor->server == NULL ? NULL : monitor->url);
  if (monitor->server == NULL) {
    even_json_null(&json, "port");
    even_json_null(&json, "token");
  } else {
    even_json_integer(&json, "port", even_server_port(monitor->server));
    even_json_string(&json, "token", monitor->token);
  }
  even_json_number(&json, "started", (double)monitor->state->started_wall_ns / 1e9);
  even_json_object_end(&json);
  even_text_add(&content, "\n");
  even_status status = even_text_status(&content);
  if (status == EVEN_OK) {
    status = agent_file(monitor, &path);
  }
  if (status == EVEN_OK) {
    status = even_file_replace_private(even_text_string(&path), even_text_string(&content), content.length);
  }
  even_text_free(&path);
  even_text_free(&content);
  return status;
}

void even_monitor_agent_file_remove(even_monitor *monitor) {
  even_text path = EVEN_TEXT_EMPTY;
  if (agent_file(monitor, &path) == EVEN_OK && even_file_remove(even_text_string(&path)) != EVEN_OK) {
    even_error_clear();
  }
  even_text_free(&path);
}
