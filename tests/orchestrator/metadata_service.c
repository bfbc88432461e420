/* Requests of HTTP, one a connection. */
#include "metadata_service.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

void metadata_service_open(metadata_service *out) {
  struct sockaddr_in where = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t bytes = sizeof where;
  memset(out, 0, sizeof *out);
  for (size_t i = 0; i < METADATA_CONNECTIONS; i++) {
    out->connections[i].fd = -1;
  }
  out->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  assert_true(out->listener >= 0);
  assert_int_equal(bind(out->listener, (struct sockaddr *)&where, sizeof where), 0);
  assert_int_equal(listen(out->listener, METADATA_CONNECTIONS), 0);
  assert_int_equal(getsockname(out->listener, (struct sockaddr *)&where, &bytes), 0);
  out->port = ntohs(where.sin_port);
}

static void drop(metadata_service *service, size_t i) {
  if (service->connections[i].fd >= 0) {
    (void)close(service->connections[i].fd);
  }
  memset(&service->connections[i], 0, sizeof service->connections[i]);
  service->connections[i].fd = -1;
}

void metadata_service_close(metadata_service *service) {
  for (size_t i = 0; i < METADATA_CONNECTIONS; i++) {
    drop(service, i);
  }
  (void)close(service->listener);
}

static void take_all(metadata_service *service) {
  for (size_t i = 0; i < METADATA_CONNECTIONS; i++) {
    if (service->connections[i].fd < 0) {
      service->connections[i].fd = accept4(service->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    }
  }
}

/* The body is the line's; a 400 where the header lacks, 404 where nothing is. */
static void find_answer(metadata_service *service, size_t at) {
  const char *request = service->connections[at].request;
  int status = 404;
  const char *body = "not here";
  const char *headers = "";
  for (size_t i = 0; i < METADATA_LINES; i++) {
    const metadata_line *line = &service->lines[i];
    if (line->beginning == NULL || strncmp(request, line->beginning, strlen(line->beginning)) != 0) {
      continue;
    }
    bool proper = strstr(request, line->header) != NULL;
    status = proper ? line->status : 400;
    headers = proper && line->headers != NULL ? line->headers : "";
    body = proper ? line->body : "";
  }
  int length = snprintf(service->connections[at].answer, sizeof service->connections[at].answer,
                        "HTTP/1.1 %d Word\r\nServer: played\r\n%sContent-Length: %zu\r\n\r\n%s", status, headers,
                        strlen(body), body);
  service->connections[at].length = (size_t)length;
}

static void misbehave(metadata_service *service, size_t at) {
  static const char garbage[] = "\x16\x03\x01\x02 no HTTP at all\r\n\r\n";
  static const char endless[] = "HTTP/1.1 200 OK\r\n\r\n";
  static const char huge[] = "HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n";
  const char *text = service->manner == MANNER_GARBAGE  ? garbage
                     : service->manner == MANNER_LONG   ? huge
                     : service->manner == MANNER_FLOODS ? endless
                                                        : NULL;
  if (text != NULL) {
    service->connections[at].length =
        (size_t)snprintf(service->connections[at].answer, sizeof service->connections[at].answer, "%s", text);
  } else if (service->manner == MANNER_HALF || service->manner == MANNER_STANDS) {
    service->connections[at].length /= 2;
  } else if (service->manner == MANNER_CLOSES || service->manner == MANNER_SILENT) {
    service->connections[at].length = 0;
  }
}

static void hear(metadata_service *service, size_t at) {
  char *request = service->connections[at].request;
  size_t *bytes = &service->connections[at].bytes;
  ssize_t got = recv(service->connections[at].fd, request + *bytes,
                     sizeof service->connections[at].request - 1 - *bytes, MSG_NOSIGNAL);
  if (got == 0 || (got < 0 && errno != EAGAIN)) {
    drop(service, at);
    return;
  }
  *bytes += got > 0 ? (size_t)got : 0;
  if (service->connections[at].answers || strstr(request, "\r\n\r\n") == NULL) {
    return;
  }
  size_t used = strlen(service->asked);
  (void)snprintf(service->asked + used, sizeof service->asked - used, "%.*s|", (int)strcspn(request, "\r"), request);
  service->connections[at].answers = true;
  find_answer(service, at);
  misbehave(service, at);
}

/* A flood is the same bytes again and again. */
static void flood(metadata_service *service, size_t at) {
  static const char block[65536];
  if (!service->connections[at].headed || service->manner != MANNER_FLOODS) {
    return;
  }
  (void)!send(service->connections[at].fd, block, sizeof block, MSG_NOSIGNAL);
}

static void say(metadata_service *service, size_t at) {
  size_t left = service->connections[at].length - service->connections[at].sent;
  bool bytewise = service->manner == MANNER_BYTEWISE;
  bool stays = service->manner == MANNER_STANDS || service->manner == MANNER_SILENT || service->manner == MANNER_LONG ||
               service->manner == MANNER_FLOODS;
  ssize_t gone =
      left == 0 ? 0
                : send(service->connections[at].fd, service->connections[at].answer + service->connections[at].sent,
                       bytewise ? 1 : left, MSG_NOSIGNAL);
  if (gone < 0) {
    if (errno != EAGAIN) {
      drop(service, at);
    }
    return;
  }
  service->connections[at].sent += (size_t)gone;
  service->connections[at].headed = service->connections[at].sent == service->connections[at].length;
  if (service->connections[at].headed && !stays) {
    drop(service, at);
    return;
  }
  flood(service, at);
}

void metadata_service_turn(metadata_service *service) {
  take_all(service);
  for (size_t i = 0; i < METADATA_CONNECTIONS; i++) {
    if (service->connections[i].fd >= 0) {
      hear(service, i);
    }
    if (service->connections[i].fd >= 0 && service->connections[i].answers) {
      say(service, i);
    }
  }
}

int metadata_service_count(const metadata_service *service, const char *beginning) {
  int count = 0;
  const char *at = service->asked;
  while (*at != '\0') {
    count += strncmp(at, beginning, strlen(beginning)) == 0 ? 1 : 0;
    at += strcspn(at, "|");
    at += *at == '|' ? 1 : 0;
  }
  return count;
}
