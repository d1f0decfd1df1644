#pragma once
#include "forward.h"
