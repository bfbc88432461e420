/* libmicrohttpd, one thread. */
#include "monitor/server.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/listener.h"
#include "os/thread.h"

#include <microhttpd.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MOST_CONNECTIONS = 64, IDLE_SECONDS = 30 };

struct even_server {
  struct MHD_Daemon *daemon;
  even_server_answer answer;
  void *context;
  int port;
  char address[48];
  char cookie[32]; /* its name holds the port: cookies do not tell ports apart, and two runs may be watched */
  char token[EVEN_SERVER_TOKEN_DIGITS + 1];
};

struct even_server_request {
  struct MHD_Connection *connection;
  const char *path;
};

static const char page_policy[] =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const char *even_server_path(const even_server_request *request) {
  return request->path;
}

long even_server_query(const even_server_request *request, const char *name, long fallback) {
  const char *value = MHD_lookup_connection_value(request->connection, MHD_GET_ARGUMENT_KIND, name);
  char *end = NULL;
  if (value == NULL || value[0] == '\0') {
    return fallback;
  }
  long number = strtol(value, &end, 10);
  return *end == '\0' ? number : fallback;
}

int even_server_port(const even_server *server) {
  return server->port;
}

/* Takes as long for a wrong first digit as for a wrong last one. */
static bool same_token(const even_server *server, const char *given) {
  unsigned char difference = 0;
  if (given == NULL || strlen(given) != EVEN_SERVER_TOKEN_DIGITS) {
    return false;
  }
  for (size_t i = 0; i < EVEN_SERVER_TOKEN_DIGITS; i++) {
    difference |= (unsigned char)(given[i] ^ server->token[i]);
  }
  return difference == 0;
}

static bool names_this_host(const even_server *server, struct MHD_Connection *connection) {
  const char *host = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
  if (host == NULL) {
    return false;
  }
  size_t length = host[0] == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
  const char *const names[] = {"127.0.0.1", "localhost", "[::1]", server->address};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (strlen(names[i]) == length && strncasecmp(host, names[i], length) == 0) {
      return true;
    }
  }
  return false;
}

typedef enum entry { ENTRY_REFUSED, ENTRY_GRANTED, ENTRY_BY_LINK } entry;

static entry entry_of(const even_server *server, struct MHD_Connection *connection) {
  const char *bearer = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
  if (same_token(server, MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, "token"))) {
    return ENTRY_BY_LINK;
  }
  if (same_token(server, MHD_lookup_connection_value(connection, MHD_COOKIE_KIND, server->cookie)) ||
      (bearer != NULL && strncasecmp(bearer, "Bearer ", 7) == 0 && same_token(server, bearer + 7))) {
    return ENTRY_GRANTED;
  }
  return ENTRY_REFUSED;
}

static void add_headers(struct MHD_Response *response, const char *content_type) {
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
  (void)MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
  (void)MHD_add_response_header(response, "X-Frame-Options", "DENY");
  (void)MHD_add_response_header(response, "Referrer-Policy", "no-referrer");
  (void)MHD_add_response_header(response, "Cross-Origin-Resource-Policy", "same-origin");
  (void)MHD_add_response_header(response, "Content-Security-Policy", page_policy);
}

static enum MHD_Result send_text(struct MHD_Connection *connection, int code, const char *content_type,
                                 const even_text *body, const char *header, const char *value) {
  struct MHD_Response *response =
      MHD_create_response_from_buffer(body->length, (void *)(uintptr_t)even_text_string(body), MHD_RESPMEM_MUST_COPY);
  if (response == NULL) {
    return MHD_NO;
  }
  add_headers(response, content_type);
  if (header != NULL) {
    (void)MHD_add_response_header(response, header, value);
  }
  enum MHD_Result queued = MHD_queue_response(connection, (unsigned int)code, response);
  MHD_destroy_response(response);
  return queued;
}

static enum MHD_Result refuse(struct MHD_Connection *connection, int code, const char *why, const char *header,
                              const char *value) {
  even_text body = EVEN_TEXT_EMPTY;
  even_text_add(&body, why);
  enum MHD_Result queued = send_text(connection, code, "text/plain; charset=utf-8", &body, header, value);
  even_text_free(&body);
  return queued;
}

static enum MHD_Result granted(even_server *server, struct MHD_Connection *connection, const char *path, entry how) {
  const even_server_request request = {.connection = connection, .path = path};
  const char *content_type = "text/plain; charset=utf-8";
  char cookie[128];
  even_text body = EVEN_TEXT_EMPTY;
  int code = server->answer(server->context, &request, &body, &content_type);
  if (even_text_status(&body) != EVEN_OK) {
    even_text_free(&body);
    return refuse(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory\n", NULL, NULL);
  }
  (void)snprintf(cookie, sizeof cookie, "%s=%s; Path=/; HttpOnly; SameSite=Strict", server->cookie, server->token);
  enum MHD_Result queued = send_text(connection, code, content_type, &body,
                                     how == ENTRY_BY_LINK ? MHD_HTTP_HEADER_SET_COOKIE : NULL, cookie);
  even_text_free(&body);
  return queued;
}

static enum MHD_Result handle(void *context, struct MHD_Connection *connection, const char *url, const char *method,
                              const char *version, const char *upload_data, size_t *upload_data_size, void **request) {
  even_server *server = context;
  (void)version, (void)upload_data, (void)upload_data_size, (void)request; /* a body is never waited for */
  if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
    return refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD\n", MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  if (!names_this_host(server, connection)) {
    return refuse(connection, MHD_HTTP_FORBIDDEN, "this server answers for 127.0.0.1 and localhost only\n", NULL, NULL);
  }
  entry how = entry_of(server, connection);
  if (how == ENTRY_REFUSED) {
    return refuse(connection, MHD_HTTP_UNAUTHORIZED,
                  "the token is missing or wrong: open the address that `evenstep run` printed, or send\n"
                  "Authorization: Bearer TOKEN with the token of the run's agent.json\n",
                  MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
  }
  return granted(server, connection, url, how);
}

/* Signals are the agent's: the server's thread takes none. */
static struct MHD_Daemon *start(even_server *server, int fd) {
  sigset_t before;
  even_thread_signals_block(&before);
  struct MHD_Daemon *daemon = MHD_start_daemon(
      MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO, (uint16_t)server->port, NULL, NULL, handle, server,
      MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned int)MOST_CONNECTIONS,
      MHD_OPTION_CONNECTION_TIMEOUT, (unsigned int)IDLE_SECONDS, MHD_OPTION_END);
  even_thread_signals_restore(&before);
  return daemon;
}

static even_status listen_at(const char *address, int *port, int *fd) {
  even_status status = even_listener_open(address, port, fd);
  if (status == EVEN_ERR_IN_USE) {
    (void)even_error_fix(
        "choose another port with --port, leave it out (any free one), or end the program that has it "
        "(`ss -ltnp` names it)");
  }
  return status;
}

even_status even_server_check(const char *address, int port) {
  int fd = -1;
  EVEN_TRY(listen_at(address, &port, &fd));
  even_listener_close(fd);
  return EVEN_OK;
}

even_status even_server_open(const even_server_params *params, even_server **out) {
  even_server *server = NULL;
  int fd = -1;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&server));
  server->port = params->port;
  server->answer = params->answer;
  server->context = params->context;
  (void)snprintf(server->address, sizeof server->address, "%s", params->address);
  (void)snprintf(server->token, sizeof server->token, "%s", params->token);
  even_status status = listen_at(params->address, &server->port, &fd);
  if (status != EVEN_OK) {
    even_free(server);
    return status;
  }
  (void)snprintf(server->cookie, sizeof server->cookie, "evenstep_%d", server->port);
  server->daemon = start(server, fd);
  if (server->daemon == NULL) {
    even_listener_close(fd);
    even_free(server);
    return even_fail(EVEN_ERR_SYSTEM, "the page's server could not start on port %d", params->port);
  }
  *out = server;
  return EVEN_OK;
}

void even_server_close(even_server *server) {
  if (server != NULL) {
    MHD_stop_daemon(server->daemon); /* closes the socket too */
    even_free(server);
  }
}
