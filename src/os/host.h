/* What the kernel says of this host: its names, the disk behind a path, the network interfaces, a process's limits. */
#ifndef EVEN_OS_HOST_H
#define EVEN_OS_HOST_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_host_names {
  char host[128];
  char kernel[128];      /* "6.1.0-25-amd64" */
  char architecture[32]; /* "x86_64" */
  char libc[32];         /* "glibc 2.36" */
} even_host_names;

even_status even_host_names_read(even_host_names *out) EVEN_MUST_USE;

/* What is the same for all processes that can name one another by number, and different for any others: the kernel's
 * run, the process namespace; "" where the kernel does not say. EVENSTEP_HOST_ID stands for the host where a test plays
 * several on one. */
void even_host_identity(char *out, size_t bytes);
/* 32 bits of that, of at most so many bytes. */
uint32_t even_host_mark(const char *identity, size_t bytes);

typedef struct even_disk {
  char filesystem[32]; /* "ext4"; "unknown" where the kernel does not say */
  char mount[256];     /* where it is mounted */
  uint64_t total_bytes;
  uint64_t free_bytes; /* that this user may take */
} even_disk;

/* The filesystem that holds `path`. Errors: EVEN_ERR_NOT_FOUND, EVEN_ERR_PERMISSION, EVEN_ERR_SYSTEM. */
even_status even_disk_read(const char *path, even_disk *out) EVEN_MUST_USE;

typedef struct even_interface {
  char name[32];
  bool up;
  bool loopback;
  int64_t megabits_per_second; /* -1 where the driver does not say (virtual ones) */
  char addresses[256];         /* "10.0.0.2, fe80::1"; "" without any */
} even_interface;

typedef struct even_interface_list {
  even_interface *items;
  size_t count;
} even_interface_list;

/* Free with even_interface_list_free, also after an error. */
even_status even_interface_list_read(even_interface_list *out) EVEN_MUST_USE;
void even_interface_list_free(even_interface_list *list);

/* How much memory this process may lock; UINT64_MAX without a limit. */
even_status even_host_memlock_bytes(uint64_t *out) EVEN_MUST_USE;

#endif
