/* HTTP on the local host behind a token: who may ask, and how an answer is sent. What is answered is the caller's. */
#ifndef EVEN_MONITOR_SERVER_H
#define EVEN_MONITOR_SERVER_H

#include "base/text.h"

typedef struct even_server even_server;
typedef struct even_server_request even_server_request;

enum { EVEN_SERVER_TOKEN_DIGITS = 32 };

/* Fills the body and the content type (a static string) and returns the HTTP code. Called on the server's thread, one
 * request at a time. */
typedef int (*even_server_answer)(void *context, const even_server_request *request, even_text *body,
                                  const char **content_type);

typedef struct even_server_params {
  const char *address; /* IPv4 */
  int port;            /* 0: any free one */
  const char *token;   /* EVEN_SERVER_TOKEN_DIGITS hexadecimal digits */
  even_server_answer answer;
  void *context;
} even_server_params;

/* Starts the server's thread. A request is answered when it is a GET or HEAD, names this host (127.0.0.1, localhost or
 * the address: a page elsewhere whose name is bound to this host anew is refused), and has the token: as ?token=…
 * (which sets a cookie), as the cookie, or as "Authorization: Bearer …". EVEN_ERR_IN_USE for a port in use. */
even_status even_server_open(const even_server_params *params, even_server **out) EVEN_MUST_USE;
/* Whether a server could be opened there now: the same errors with the same fix; the port is given back at once. */
even_status even_server_check(const char *address, int port) EVEN_MUST_USE;
/* Ends the thread; requests under way are answered first. */
void even_server_close(even_server *server);
int even_server_port(const even_server *server);

const char *even_server_path(const even_server_request *request);
/* A number in the query, `fallback` where it is absent or no number. */
long even_server_query(const even_server_request *request, const char *name, long fallback);

#endif
