// What torch does slowly in float32 on a CPU: see each file. Compiled by ../../../native.py.

#include "attention.h"
#include "copies.h"
#include "features.h"
