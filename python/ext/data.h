/* The memory of an array or tensor, whoever made it. */
#ifndef EVEN_EXT_DATA_H
#define EVEN_EXT_DATA_H

#include "ext.h"

#include <stdbool.h>

typedef struct even_ext_data {
  void *address;
  size_t count;   /* elements */
  size_t element; /* bytes of one */
  int dtype;      /* what the engine reduces them as; -1 where it cannot (they can be moved) */
  int reals;      /* 2 where each is a complex number, reduced as two reals; else 1 */
  bool read_only;
  PyObject *keeper; /* owned, may be NULL: what the memory lives by beside the object */
} even_ext_data;

/* Finds the memory of `object`: through DLPack's table of functions, NumPy's array interface or `__dlpack__()`, the
 * first that it has. -1 with an exception where there is none, where the elements do not lie one after the other or do
 * not mean what they say (a conjugate), or where they are not in this host's memory. even_ext_data_close on success. */
int even_ext_data_open(PyObject *object, even_ext_data *out);
void even_ext_data_close(even_ext_data *data);

/* Whether the engine can reduce the elements with an operation. */
bool even_ext_data_reducible(const even_ext_data *data, int op);

/* Adds data_of to the module; 0, or -1 with an exception set. */
int even_ext_add_data(PyObject *module);

#endif
